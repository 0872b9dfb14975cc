# Compiles the page of `tessera report` into the program: tessera/report/page/ and uPlot, which ./dev fetches into
# build/assets/uplot. Without uPlot the program builds, but `tessera report` fails with an error that names uPlot.
function(tessera_report_page)
  set(page ${CMAKE_SOURCE_DIR}/tessera/report/page)
  file(GLOB charts CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/build/assets/uplot/dist/uPlot.*)
  set(parts ${page}/page.html ${page}/page.css ${page}/page.js)
  if(charts)
    set(uplot ${CMAKE_SOURCE_DIR}/build/assets/uplot)
    list(APPEND parts ${uplot}/dist/uPlot.min.css ${uplot}/dist/uPlot.iife.min.js ${uplot}/LICENSE)
  endif()
  set(out ${CMAKE_BINARY_DIR}/generated/page_parts.cc)
  add_custom_command(OUTPUT ${out}
    COMMAND ${CMAKE_COMMAND} -DOUT=${out} "-DPARTS=${parts}" -P ${CMAKE_SOURCE_DIR}/cmake/embed_page.cmake
    DEPENDS ${parts} ${CMAKE_SOURCE_DIR}/cmake/embed_page.cmake VERBATIM)
  target_sources(tessera_report PRIVATE ${out})
endfunction()
